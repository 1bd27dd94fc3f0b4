"""The report page: figures from what was measured, and one self-contained HTML file around them."""
