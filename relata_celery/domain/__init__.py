"""Values and rules. Standard library only: no clock, no random source, no input or output.

Whatever a rule needs of those (the time, a random number, a setting) is handed to it.
"""
