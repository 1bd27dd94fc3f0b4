"""Slots on the nodes of a Ray cluster. Only driver.py imports Ray, in a process of its own.

* Every free GPU is a slot, or on a cluster without GPUs every node. Of several GPU models only the most common one is
  used. Ray sends your working directory to the nodes (at most 512 MB, without the files that `.gitignore` and
  `.rayignore` name), and nothing else: data must be in a place that every node can read. autotune_amp and Ray must be
  installed there, with the same Python.
* **A node is compared with the first**: device model, driver, memory, and the fingerprint of your code, library
  versions, flags and environment. A node that differs is left out, with a warning that names the difference. The load
  of a node by other users is not measured.
* **Nodes come, go and are preempted.** A new one joins as soon as it has loaded the workload. A lost node's job runs
  again once on another node; if that is lost too, the setting has failed. A confirmation's round starts again on
  another node. A node counts as lost if it does not answer for 30 s, cannot start processes, or has a full disk.
* The search itself, its ledger and the recommendation stay on the host where you start it. If it is killed, the same
  command resumes it; if the head node is lost, the best result so far is saved. Code is sent only from there to the
  nodes, over Ray's own connections: keep a cluster on a network that you trust, as Ray advises.
* Tested on clusters of processes on one host, but not with several hosts or with GPUs.

In Kubernetes it is a RayJob, with an image that has Ray and autotune_amp, and a volume for the results:

```yaml
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: autotune-amp}
spec:
  entrypoint: autotune-amp search train.py:workload --ray auto --out /shared/studies
  rayClusterSpec:
    headGroupSpec: {rayStartParams: {}, template: {spec: {containers: [{name: ray, image: IMAGE}]}}}
    workerGroupSpecs:
      - {groupName: gpus, replicas: 4, minReplicas: 4, maxReplicas: 4, rayStartParams: {},
         template: {spec: {containers: [{name: ray, image: IMAGE, resources: {limits: {nvidia.com/gpu: 1}}}]}}}
```
"""
