"""Studies: commands that answer a question with tables, on one model and its texts.

A module with a `STUDY` (`study`) is a command. Several of them share models and texts (`texts`), contexts
that configurations continue (`continued`), and what is measured in `acceptance`, `needles`, `two_devices`.
"""
