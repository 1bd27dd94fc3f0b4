"""Slots on the nodes of a Ray cluster. Only driver.py knows Ray, in a process of its own.

* Every free card is a slot, or on a cluster without cards every node: of several models the most common one. The
  nodes get your working directory as Ray sends it (without what `.gitignore` and `.rayignore` name; 512 MB at most),
  and nothing else: data must be where every node finds it. autotune_amp and Ray are installed there, and the same
  Python.
* **A node is compared with the first**: device model, driver, memory, and the fingerprint of what it loaded (your
  code, library versions, flags, the environment). One that differs is left out, and the answer's warnings say in
  what. What others do there meanwhile is not seen.
* **Nodes come, go and are preempted.** A new one joins as soon as it has loaded the workload. A lost node's job runs
  again once, elsewhere; lost again it is the setting's failure. A confirmation's round begins anew, whole, on
  another node. A node that says nothing for 30 s, that cannot start processes or whose disk is full is given up.
* The search itself, its ledger and the answer stay where you start it. Killed, the same command goes on; if the head
  is lost, the best so far is saved. Code goes from there to the nodes alone, over Ray's own connections: keep a
  cluster on a network that you trust, as Ray advises.
* Tried on clusters of processes on one host: neither several hosts nor cards were seen.
"""
