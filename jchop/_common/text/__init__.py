"""Tables as text and as HTML; the HTML of objects that show themselves."""

from jchop._common.text.tables import TableOrLine, Tables, table_lines

__all__ = ["TableOrLine", "Tables", "table_lines"]
