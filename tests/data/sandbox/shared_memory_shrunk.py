import mmap, time
kept = []
for i in range(20):
  kept.append(mmap.mmap(-1, 32 << 20))
  for j in range(32): kept[-1].write(b"x" * (1 << 20))
  kept[-1].resize(4096)
time.sleep(1)
print("BREACH: holds 640 MB")
