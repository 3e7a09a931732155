// node search_site.js BUILT QUESTION...: the pages that the search of a built site shows for each question, as JSON.
// It runs the site's own scripts, with the little that they need of a browser.
const fs = require("fs");
const vm = require("vm");

const [built, ...questions] = process.argv.slice(2);
const page = { appendChild: () => page };
const context = vm.createContext({
  questions,
  document: { getElementById: () => null, createElement: () => page, documentElement: { dataset: {} }, body: page },
  localStorage: { setItem() {} },
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready: () => {},
});
context.window = context;
const files = ["base-stemmer.js", "english-stemmer.js", "language_data.js", "searchtools.js", "../searchindex.js"];
for (const file of files) {
  const path = `${built}/_static/${file}`;
  if (fs.existsSync(path)) vm.runInContext(fs.readFileSync(path, "utf8"), context);
}
const answer = "questions.map((q) => Search._performSearch(...Search._parseQuery(q)).reverse().map((hit) => hit[0]))";
console.log(JSON.stringify(vm.runInContext(answer, context)));
