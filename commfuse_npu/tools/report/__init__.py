"""Results as pictures and as one page of HTML that needs nothing else.

From the top down::

    page         verdict, sections, environment, as HTML
    charts       bars, lines, parts of a time, a Gantt, losses, as Vega-Lite
    drawing      Vega-Lite to PNG, SVG and HTML (vl-convert-python, which is optional)
    palette      colours, dashes and marks; none twice in a picture
"""
