import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
import time
for i in range(16, 100000):
  address = libc.mmap(i << 30, 4096, 1, 0x100022, -1, 0)
  if address == i << 30: ctypes.c_char.from_address(address).value
time.sleep(4)
print("BREACH: holds hundreds of MB of page tables")
