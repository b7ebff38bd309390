"""The fault suite: real processes under load, broken by a schedule that a seed replays. README.md says how."""
