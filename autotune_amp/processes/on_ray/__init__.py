"""Slots on the nodes of a Ray cluster. Only driver.py imports Ray, in a process of its own.

* Every free GPU is a slot, or on a cluster without GPUs every node; of several models the most common one is used. The
  nodes get your working directory as Ray sends it (without the files that `.gitignore` and `.rayignore` name; 512 MB at
  most), and nothing else: data must be where every node finds it. autotune_amp and Ray must be installed there, with
  the same Python.
* **A node is compared with the first**: device model, driver, memory, and the fingerprint of what it loaded (your
  code, library versions, flags, the environment). A node that differs is left out, with a warning that names the
  difference. The load by others on a node is not seen.
* **Nodes come, go and are preempted.** A new one joins as soon as it has loaded the workload. A lost node's job runs
  again once, elsewhere; lost again it is the setting's failure. A confirmation's round starts again on another node. A
  node that does not answer for 30 s, that cannot start processes or whose disk is full is given up.
* The search itself, its ledger and the recommendation stay on the host where you start it. Killed, the same command
  resumes; if the head is lost, the best so far is saved. Code is sent only from there to the nodes, over Ray's own
  connections: keep a cluster on a network that you trust, as Ray advises.
* Tried on clusters of processes on one host: neither with several hosts nor with GPUs.

In Kubernetes it is a RayJob, with an image that has Ray and autotune_amp, and a volume for the answer:

```yaml
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: autotune-amp}
spec:
  entrypoint: autotune-amp search train.py:workload --ray auto --out /shared/studies
  rayClusterSpec:
    headGroupSpec: {rayStartParams: {}, template: {spec: {containers: [{name: ray, image: IMAGE}]}}}
    workerGroupSpecs:
      - {groupName: cards, replicas: 4, minReplicas: 4, maxReplicas: 4, rayStartParams: {},
         template: {spec: {containers: [{name: ray, image: IMAGE, resources: {limits: {nvidia.com/gpu: 1}}}]}}}
```
"""
