"""Groups explored exhaustively: every order of events, within a budget of faults.

::

    scenario    who claims, meets and visits what, how time runs, how much may go wrong
    scenarios   those that are explored
    peers       the real groups of each peer: what each does in a state at an event, asked once
    copies      a copy of groups, and their state as one value
    history       what has become of each ticket, and what must hold
    situations  all that can happen next
    search      all situations, breadth first; who is stuck, and who waits for how long
    transcript  a way through situations, in words
    __main__    the command line
"""
