// Charts of a replay.
