"""How bytes move: transports, the message codec and collectives.

Nothing is imported here: a supervisor needs a `Channel`, and neither torch nor ZeroMQ.
"""
