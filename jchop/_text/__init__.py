"""Tables as text and as HTML; the HTML of objects that show themselves."""

from jchop._text.tables import Part, Tables, table_lines

__all__ = ["Part", "Tables", "table_lines"]
