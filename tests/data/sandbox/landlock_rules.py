import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall(444, struct.pack("QQ", 0, 1), 16, 0)
print("BREACH: a rule set" if made >= 0 else "DONE")
