import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
import os, time
for i in range(30):
  with open("f%d" % i, "wb+") as file:
    os.unlink("f%d" % i)
    for j in range(4): file.write(b"x" * (1 << 20))
    file.flush()
    libc.mmap(None, 4096, 1, 1, file.fileno(), 0)
time.sleep(2)
print("BREACH: holds 120 MB")
