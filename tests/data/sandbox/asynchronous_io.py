import ctypes
context = ctypes.c_ulong()
print("BREACH: a context" if ctypes.CDLL(None).syscall(206, 1000, ctypes.byref(context)) == 0 else "DONE")
