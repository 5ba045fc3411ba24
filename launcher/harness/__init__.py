"""Hold what all benchmarks and paper experiments share, once.

`claims` states and checks a claim, `bench` goes from a command line to an exit code, `tables` and
`pictures` show rows, `processes` and `namespaces` hold what a measurement needs and remove it.
"""
