import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
import os, time
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
start = libc.mmap(None, 65000 * 4096, 0, 0x22, -1, 0)
for i in range(0, 64800, 2):
  libc.mprotect(start + i * 4096, 4096, 1)
for i in range(20):
  if os.fork() == 0: break
time.sleep(30)
