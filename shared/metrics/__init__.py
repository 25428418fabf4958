"""What each process tells Prometheus.

`instruments.py` counts, `catalog.py` lists what is counted, `exposition.py` and
`serving.py` hand it out. Only the last two need the package prometheus-client, and they
load it when a process begins to serve: counting costs a dictionary and no import.
"""
