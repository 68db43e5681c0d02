"""The plain parameter server: one server, any number of clients, nothing else of Shoal needed.

tensors    what tensors there are, whether others fit them, and how they travel
messages   numbered requests and their answers
line       from a client to a server: asks until it is answered
loop       a server's end: requests come in, answers go out
clientele  who comes there, and who has left
table      the parameters and their optimizer
desk       answers requests about them, each once, whatever the wire does to them; no sockets
server     a desk, its loop and a thread
client     the other end

A key-value store has messages, lines, loops and packing from here, and desks of its own (`shoal.kv`).
"""
