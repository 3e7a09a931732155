// The pages of each published version, by its folder. docs/publish.py writes this file anew in all of them.
var VERSIONS = {};
