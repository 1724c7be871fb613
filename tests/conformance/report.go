package conformance

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// verdict is the result of one test.
type verdict string

const (
	passed verdict = "passed"
	failed verdict = "failed"
	notRun verdict = "not run"
)

// outcome is a test with its verdict, and the reason if the verdict is not `passed`.
type outcome struct {
	test    suite.ConformanceTest
	verdict verdict
	reason  string
}

// writeReport writes a line for each test, then the counts: of each profile's core tests, of each
// feature's tests, and of all.
func writeReport(w io.Writer, outcomes []outcome) {
	for _, o := range outcomes {
		line := fmt.Sprintf("%-8s %s", o.verdict, o.test.ShortName)
		if o.reason != "" {
			line += ": " + o.reason
		}
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "\n%-46s %6s %6s %8s %6s\n", "tests", passed, failed, notRun, "all")
	for _, profile := range []suite.ConformanceProfile{
		suite.GatewayHTTPConformanceProfile, suite.MeshHTTPConformanceProfile,
	} {
		writeCounts(w, string(profile.Name)+" core", outcomes, func(test suite.ConformanceTest) bool {
			return profile.CoreFeatures.HasAll(test.Features...)
		})
	}
	for _, name := range featureNames() {
		writeCounts(w, string(name), outcomes, func(test suite.ConformanceTest) bool {
			return slices.Contains(test.Features, name)
		})
	}
	writeCounts(w, "all", outcomes, func(suite.ConformanceTest) bool { return true })
}

func writeCounts(w io.Writer, name string, outcomes []outcome, counts func(suite.ConformanceTest) bool) {
	of := map[verdict]int{}
	all := 0
	for _, o := range outcomes {
		if counts(o.test) {
			of[o.verdict]++
			all++
		}
	}
	fmt.Fprintf(w, "%-46s %6d %6d %8d %6d\n", name, of[passed], of[failed], of[notRun], all)
}

// featureNames returns the names of all features of the suite, sorted.
func featureNames() []features.FeatureName {
	names := features.SetsToNamesSet(features.AllFeatures).UnsortedList()
	slices.SortFunc(names, func(a, b features.FeatureName) int { return strings.Compare(string(a), string(b)) })
	return names
}
