import json, socket
P = json.loads(r"""@PARAMS@""")
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
  try:
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.sendto(b"x", P["datagram_path"])
    print("BREACH: sent")
  except OSError as error:
    print(error)
print("DONE")
