// A list of [function of view.js, ...arguments] from stdin, as JSON; what they return, on stdout.
import { readFileSync } from "node:fs";
const view = await import(process.argv[2] + "/view.js");
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(([name, ...given]) => view[name](...given))));
