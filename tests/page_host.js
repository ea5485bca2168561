// Runs calls of the page's arithmetic: reads {script, calls} from stdin, prints their results.
// Numbers JSON has no words for travel as strings.
const { script, calls } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const arithmetic = new Function(`${script}\nreturn arithmetic;`)();
const plain = (_, x) => (typeof x === "number" && !Number.isFinite(x) ? String(x) : x);
console.log(JSON.stringify(calls.map(([name, ...given]) => arithmetic[name](...given)), plain));
