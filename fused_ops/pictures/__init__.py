"""Pictures of times and bytes, as SVG and in pages for browsers, without any library."""
