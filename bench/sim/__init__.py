"""A simulator of a fleet: discrete events, recorded traces, and the router's own policy code.

trace.py reads traces; fleet.py, tiers.py and decode.py are the machines; world.py moves the clock; frozen.py and
ours.py decide; figures.py says what came of it. README.md has the model and its limits.
"""
