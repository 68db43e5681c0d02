"""Hosts that are reached over a network: an agent on each, and the supervisor's end of the connection to it.

| file              | what it does                                                                        |
|-------------------|-------------------------------------------------------------------------------------|
| `agent.py`        | `shoal host --join`: starts and watches this host's processes for a supervisor        |
| `remote_host.py`  | a `Host` whose processes an agent starts                                              |
| `gathering.py`    | an engine: has agents started, waits until all have joined, and compares their versions |
| `starting.py`     | how agents are started, and get the run's key: by ssh, here, or by hand               |
| `line.py`         | the connection between the two                                                        |
"""
