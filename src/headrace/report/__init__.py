"""What happened: run folders, metrics, timelines, progress, and pages that can be looked at.

`page` writes one self-contained HTML file with text, tables and plots.
"""
