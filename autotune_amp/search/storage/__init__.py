"""What a search keeps: its own folder, its study in an Optuna storage, and there its answer for others.

* **A team's storage** (any that Optuna takes) keeps the studies of many people and hosts beside one another, and the
  answers: the same request on another host of the same kind (the same code, options, versions and model of device,
  as much memory) is answered from there, and says where and when that was measured. The same code asked for
  otherwise (another batch size, budget or precision) first tries what was best there. `--fresh` asks nobody. Nothing
  that is read from it is run.
* **A storage that goes away** ends no search: what is measured is kept in the study's folder, and told once it is
  back, at the latest when the search ends; what it lacks then is said. A password in its URL is shown by `ps`, and
  by nothing of ours.
"""
