"""The plain parameter server: one server, any number of clients, nothing else of Shoal needed.

tensors    what tensors there are, whether others fit them, and how they travel
messages   what a client asks and what a server answers
table      the parameters and their optimizer
desk       answers requests, each once, whatever the wire does to them; no sockets
server     a desk on a wire
client     the other end
"""
