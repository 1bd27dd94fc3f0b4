"""Service for a team: searches on request over HTTP on this machine, one at a time for each device, and training runs.

* `settings`: the file that names the targets and limits. Nothing that arrives over the network is executed, imported
  or used as a path.
* `gate`: who may ask, how much and how long: tokens, rates, sizes, timeouts.
* `jobs`: the queue, in a database. A killed service goes on with it when it is started again.
* `searching`: each search is a process, `autotune-amp search`, which ends with the service.
* `runs`: the training runs that post their metrics by the sink `http()`, and their pages.
* `app`: the routes. `server`: the socket and the signals. `client`: the other side, without further packages.
"""
