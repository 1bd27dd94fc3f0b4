"""Storage of a search: its folder, its study in an Optuna storage, and recommendations that a storage shares.

* **A shared storage** (any database that SQLAlchemy supports) keeps the studies and recommendations of many users and
  hosts. The same request on another host of the same kind (the same code, options, versions and device model, as much
  memory) is answered from there; the report says where and when it was measured. Another request for the same code
  (another batch size, budget or precision) first tries the setting that was best there. `--fresh` ignores it. Nothing
  that is read from it is executed.
* **A storage that fails** does not end a search: records are kept in the study's folder, and sent once the storage can
  be reached, at the latest when the search ends; a warning is shown if it still lacks some. A password in its URL is
  visible in `ps`, but never printed or saved by this package.
"""
