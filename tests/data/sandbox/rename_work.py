import os
for path in ("/box/work", os.getcwd()):
  try:
    os.rename(path, os.path.dirname(path) + "/gone")
    os.symlink("/proc/self", path)
  except OSError as error:
    print(error)
print("DONE")
