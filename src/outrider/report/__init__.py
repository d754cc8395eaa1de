"""Pictures and pages from figures that others measured; the only home of the plot library."""
