"""``report.html``: the results of a run on one page."""
