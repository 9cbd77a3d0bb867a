"""Pictures in Vega-Lite, as files.

::

    charts       lines, a Gantt chart, as Vega-Lite
    drawing      Vega-Lite to PNG and SVG (vl-convert-python, which is optional)
"""
