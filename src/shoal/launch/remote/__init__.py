"""Hosts that are reached over a network: an agent on each, and the supervisor's end of the connection to it.

| file              | what it does                                                                        |
|-------------------|-------------------------------------------------------------------------------------|
| `agent.py`        | `shoal host --join`: starts and watches this host's processes for a supervisor        |
| `remote_host.py`  | a `Host` whose processes an agent starts                                              |
| `gathering.py`    | an engine: has agents started, waits until all have joined, and compares their versions |
| `starting.py`     | the contract of what starts agents (`launch/engines/`), and how they get the run's key |
| `line.py`         | the connection between the two                                                        |
| `sources.py`      | which files a task is made of, and which of them a host lacks                         |
| `luggage.py`      | sends a host what it lacks                                                            |
| `home.py`         | the host's own folder for that                                                        |
| `pieces.py`       | files in pieces                                                                       |
| `teller.py`       | what an agent tells, and in which order                                               |
| `outgoing.py`     | what processes leave in a run folder of their host's own, on its way home             |
| `incoming.py`     | where it comes to                                                                     |
| `heirs.py`        | where an agent is called by another supervisor, should its own be gone                |
| `adoption.py`     | that supervisor's part: taking over a run that goes on                                |
"""
