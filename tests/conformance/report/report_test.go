package report

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

const logText = `=== RUN   TestMesh/A
    apply.go:1: now: Creating x
=== RUN   TestMesh/A/first
    pod.go:2: now: Response expectation failed for request: [x]  not ready yet: wanted 303, got 200 (after 1ms)
=== RUN   TestMesh/B
        	Error:      	Received unexpected error:
        	            	context deadline exceeded
=== NAME  TestMesh/A
=== RUN   TestMesh/C
`

func TestReasonsAreTheSuitesLastWords(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(log, []byte(logText), 0o644); err != nil {
		t.Fatal(err)
	}
	of := func(name string, v Verdict, reason string) Outcome {
		return Outcome{suite.ConformanceTest{ShortName: name}, v, reason}
	}
	found := []Outcome{of("A", Failed, ""), of("B", Failed, ""), of("C", Failed, "refused"), of("A", Passed, ""), of("B", Failed, "refused")}
	if err := AddReasons(found, log); err != nil {
		t.Fatal(err)
	}
	for i, expected := range []string{"wanted 303, got 200", "context deadline exceeded", "refused", "", "context deadline exceeded; refused"} {
		if found[i].Reason != expected {
			t.Errorf("%d: %q; expected %q", i, found[i].Reason, expected)
		}
	}
}

func TestCountsAreOfEachFeature(t *testing.T) {
	of := func(v Verdict, names ...features.FeatureName) Outcome {
		return Outcome{suite.ConformanceTest{Features: names}, v, ""}
	}
	var text strings.Builder
	Write(&text, []Outcome{
		of(Passed, features.SupportMesh, features.SupportHTTPRoute),
		of(Failed, features.SupportMesh, features.SupportHTTPRoute, features.SupportMeshConsumerRoute),
		of(NotRun, features.SupportGateway, features.SupportHTTPRoute),
	})
	counts := map[string]string{}
	for line := range strings.Lines(text.String()) {
		fields := strings.Fields(line)
		if n := len(fields); n > 4 {
			counts[strings.Join(fields[:n-4], " ")] = strings.Join(fields[n-4:], " ")
		}
	}
	for name, expected := range map[string]string{
		"GATEWAY-HTTP core": "0 0 1 1",
		"MESH-HTTP core":    "1 0 0 1",
		"MeshConsumerRoute": "0 1 0 1",
		"HTTPRoute":         "1 1 1 3",
		"TLSRoute":          "0 0 0 0",
		"all":               "1 1 1 3",
	} {
		if counts[name] != expected {
			t.Errorf("%s: %q; expected %q", name, counts[name], expected)
		}
	}
	const features, totals = 64, 5
	if len(counts) != features+totals+1 { // and the heading
		t.Errorf("%d lines of counts", len(counts))
	}
}

func TestEachNameIsDescribedOnce(t *testing.T) {
	names := map[features.FeatureName]bool{}
	for _, f := range known {
		if names[f.name] {
			t.Errorf("%s is there twice", f.name)
		}
		names[f.name] = true
	}
	for _, name := range featureNames() {
		if !names[name] {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestAMistypedNameIsAnErrorWithTheNearestOne(t *testing.T) {
	for _, name := range []string{"", "HTTPRouteWeight"} {
		if err := CheckName(name, tests.ConformanceTests); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for name, nearest := range map[string]string{"HttpRouteWeigth": "HTTPRouteWeight", "MeshTrafficSplits": "MeshTrafficSplit"} {
		err := CheckName(name, tests.ConformanceTests)
		if err == nil || !strings.HasSuffix(err.Error(), " "+nearest) {
			t.Errorf("%q: %v; expected %s", name, err, nearest)
		}
	}
}

func TestTestsOfTheDriverProveNothing(t *testing.T) {
	var outcomes []Outcome
	for _, test := range tests.ConformanceTests {
		if DriverPart(test) != "" {
			outcomes = append(outcomes, Outcome{test, Passed, DriverPart(test)})
		}
	}
	// A test that the suite renames would count as a proof again.
	if len(outcomes) != len(driverParts) {
		t.Errorf("%d of %d tests are in the suite", len(outcomes), len(driverParts))
	}
	for _, name := range Claimed() {
		if isProven(name, outcomes) || proofs(name, outcomes) != "" {
			t.Errorf("%s is proven", name)
		}
	}
}

func TestAFailedTestMissesABar(t *testing.T) {
	of := func(v Verdict, names ...features.FeatureName) Outcome {
		return Outcome{suite.ConformanceTest{Features: names}, v, ""}
	}
	var outcomes []Outcome
	for _, name := range Claimed() {
		outcomes = append(outcomes, of(Passed, name))
	}
	var text strings.Builder
	if !Judge(&text, outcomes) {
		t.Errorf("bars are missed:\n%s", text.String())
	}
	outcomes = append(outcomes, of(Failed, features.SupportMesh, features.SupportHTTPRoute))
	if text.Reset(); Judge(&text, outcomes) {
		t.Errorf("all bars are held:\n%s", text.String())
	}
}
