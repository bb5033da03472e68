// The page must run under `script-src 'self'; style-src 'self'`: no inline script, no data addresses, no eval.
export default {
  base: "/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
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
