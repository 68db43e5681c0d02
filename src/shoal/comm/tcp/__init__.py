"""What leaves a process over tcp: nobody gets further than the gate without the run's key, and what leaves the
host is encrypted.

| file                | what it does                                                                     |
|---------------------|----------------------------------------------------------------------------------|
| `addresses.py`      | which address and port of this host others are to call                           |
| `certificate.py`    | a certificate from the run's key: nobody has to be sent one                      |
| `handshake.py`      | how caller and listener prove themselves, and TLS afterwards                     |
| `records.py`        | TLS records of ours, for bulk: many at a time                                    |
| `door.py`           | a listener; few strangers may wait before it, and not for long                   |
| `packets.py`        | packets as bytes of a stream                                                     |
| `outgoing.py`       | the connection to one peer, from the first call on                               |
| `stream_wire.py`    | packets between many processes, moved by a thread: bulk                          |
| `stream_channel.py` | messages between two processes, both ways: control                               |

Nothing is imported here: a host's agent needs channels, and no wire.
"""
