"""Keep one core busy until the process that started this ends, or ends this."""

import os

parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
