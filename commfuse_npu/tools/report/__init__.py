"""Pictures in Vega-Lite, as files and in a page of HTML that needs no network.

::

    page         verdict, sections, environment, as HTML
    charts       bars, lines, a Gantt chart, as Vega-Lite
    drawing      Vega-Lite to PNG, SVG and JavaScript (vl-convert-python, which is optional)
"""
