import ctypes, time
ctypes.CDLL(None).prctl(15, b"a\rb", 0, 0, 0)
time.sleep(0.3)
print("DONE")
