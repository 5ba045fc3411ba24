"""Explore groups exhaustively: every order of events, within a budget of faults.

::

    scenario        requests and trainers, clocks, the budget of faults
    scenarios       the scenarios that are explored
    peers           the real groups of each peer: the reaction of each state to each event, cached
    copies          copies of groups, and their state as one value
    ticket_history  the history of each ticket, and what must hold
    situations      all states, and all events that are possible in each
    wire            the messages in flight
    search          all situations, breadth first; which are stuck, and how long peers wait
    transcript      a path through situations, in words
    __main__        the command line
"""
