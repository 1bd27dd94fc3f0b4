"""Storage of a search: its own folder, its study in an Optuna storage, and its recommendation there for others.

* **A team's storage** (any that Optuna takes) keeps the studies of many people and hosts side by side, and their
  recommendations. The same request on another host of the same kind (the same code, options, versions and device model,
  as much memory) is answered from there, with where and when it was measured. Another request for the same code
  (another batch size, budget or precision) first tries the setting that was best there. `--fresh` ignores it. Nothing
  that is read from it is executed.
* **A storage that goes away** ends no search: records are kept in the study's folder, and sent once the storage is
  back, at the latest when the search ends; a warning is shown if it still lacks some. A password in its URL is shown by
  `ps`, and by nothing of ours.
"""
