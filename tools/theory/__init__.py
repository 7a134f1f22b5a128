"""What speculation yields, in closed forms."""
