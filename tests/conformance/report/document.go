package report

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sigs.k8s.io/gateway-api/pkg/features"
)

const documentHead = `# Features of Gateway API

A whole run of ` + "`make test-compat`" + ` writes this page from its results; do not edit it. The names are
those of Gateway API 1.7.0 (` + "`pkg/features`" + `), and the tests those of its conformance suite, which
` + "`tests/conformance`" + ` runs in a world. Canal claims a feature only if a test of the feature passes and
none fails. A test is listed with the rarest of its features. Tests of what the driver does in place
of an API server (generations, storage of statuses) are no proofs and not listed.
[tests/conformance/results.tsv](../tests/conformance/results.tsv) has the verdict on each test.

| feature | Canal can | status | tests that prove it |
|---|---|---|---|
`

// WriteDocuments writes docs/features.md and the verdicts of a whole run into the repository.
func WriteDocuments(repository string, outcomes []Outcome) error {
	var text strings.Builder
	text.WriteString(documentHead)
	for _, f := range known {
		status := "claimed"
		switch {
		case f.missing != "":
			status = "not claimed: " + f.missing
		case !isProven(f.name, outcomes):
			status = "claimed, but a test failed"
		}
		fmt.Fprintf(&text, "| %s | %s | %s | %s |\n", f.name, f.description, status, proofs(f.name, outcomes))
	}
	if err := os.WriteFile(filepath.Join(repository, "docs", "features.md"), []byte(text.String()), 0o644); err != nil {
		return err
	}
	text.Reset()
	for _, o := range outcomes {
		fmt.Fprintf(&text, "%s\t%s\t%s\n", o.Test.ShortName, o.Verdict, o.Reason)
	}
	return os.WriteFile(filepath.Join(repository, "tests", "conformance", "results.tsv"), []byte(text.String()), 0o644)
}

// proofs returns the passed tests of which no feature has fewer tests than this one.
func proofs(name features.FeatureName, outcomes []Outcome) string {
	counts := map[features.FeatureName]int{}
	for _, o := range outcomes {
		for _, feature := range o.Test.Features {
			counts[feature]++
		}
	}
	var names []string
	for _, o := range outcomes {
		isRarest := !slices.ContainsFunc(o.Test.Features, func(other features.FeatureName) bool {
			return counts[other] < counts[name]
		})
		if o.proves() && slices.Contains(o.Test.Features, name) && isRarest {
			names = append(names, "`conformance::"+o.Test.ShortName+"`")
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}
