// SPDX-License-Identifier: Apache-2.0
// The scripts of pages: npx eslint src (needs eslint 10 from npm, nothing else).
const browser = [
  ...["document", "globalThis", "location", "history", "navigator", "performance", "Image", "Option", "URL"],
  ...["URLSearchParams", "Blob", "Response", "DecompressionStream", "atob", "clearTimeout", "setTimeout"],
  "requestAnimationFrame", "window",
];

export default [
  {
    files: ["src/**/*.js"],
    languageOptions: {
      ecmaVersion: 2024,
      sourceType: "module",
      globals: Object.fromEntries(browser.map((name) => [name, "readonly"])),
    },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "no-const-assign": "error",
      "no-dupe-keys": "error",
      "no-redeclare": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unreachable": "error",
      "no-unused-vars": ["error", { caughtErrors: "none" }],
      "no-use-before-define": ["error", { functions: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
];
