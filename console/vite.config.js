import { readFileSync } from "node:fs";

// The licences of the packages that are in the built page, as they require.
const licences = {
  name: "licences",
  generateBundle() {
    const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
    const texts = Object.keys(dependencies).map((name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8")}`);
    this.emitFile({ type: "asset", fileName: "licences.txt", source: texts.join("\n---\n\n") });
  },
};

// The page must run under `script-src 'self'; style-src 'self'`: no inline script, no data addresses, no eval.
export default {
  base: "/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  plugins: [licences],
  build: {
    outDir: "../src/holdfast/console/built",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: false,
    sourcemap: false,
    chunkSizeWarningLimit: 1000,
  },
};
