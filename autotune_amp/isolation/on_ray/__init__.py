"""Slots on the nodes of a Ray cluster. Only driver.py knows Ray, in a process of its own."""
