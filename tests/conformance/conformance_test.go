// Package conformance runs the Gateway API conformance suite, version 1.7.0, against Canal, and
// prints for each of its tests whether it passed, failed, or was not run and why, and the counts of
// each feature.
//
// The tests are the suite's own code, unchanged. Three things stand in for a cluster: [cluster], a
// client whose changes are made in a tenant by `canal apply`; [execServer], by which the suite runs
// its client in a pod; and package cmd/echo, the program of the suite's pods. Pods, nodes, gateways
// and the controller are a world's, with real processes and real traffic; the suite itself runs in a
// host of the world that is outside the tenant.
//
// It does not make Kubernetes: there are no defaults, no validation and no status, except what Canal
// says itself. Canal has no ingress Gateway yet: while it refuses a GatewayClass, the tests of
// feature Gateway are not run. Once it accepts one, they are, and then [cluster] has to read their
// conditions from Canal. Canal's own controller name and the addresses of its Gateways come then too.
//
// A failed test of the suite is a result, not an error: the exit code is 0 if the report is whole.
package conformance

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"canal.mesh/tests/conformance/report"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/conformance"
	"sigs.k8s.io/gateway-api/conformance/tests"
	"sigs.k8s.io/gateway-api/conformance/utils/config"
	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

const gatewayClass = "canal"

var (
	canal  = flag.String("canal", "../../target/debug/canal", "path of canal, beside which its other programs stand")
	folder = flag.String("folder", "../../target/conformance", "folder for the world's file, the pods' program and the suite's log")
	only   = flag.String("only", "", "run only the test of this name")
	inside = flag.String("inside", "", "run the suite in this world, from whose outside host this process runs")

	// What the tests below share, and their results.
	judged   *cluster
	server   string
	outcomes []report.Outcome
)

func TestMain(m *testing.M) {
	flag.Parse()
	part := makeWorld
	if *inside != "" {
		part = func() error { return runSuite(m) }
	}
	if err := part(); err != nil {
		fmt.Fprintf(os.Stderr, "conformance: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0) // a test of the suite that failed would make it 1
}

// makeWorld makes the world and runs this program again in its outside host, because the suite's
// Gateway tests dial from their own process.
func makeWorld() error {
	runtime.LockOSThread()
	// The outside host has another working directory.
	for _, path := range []*string{canal, folder} {
		var err error
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(filepath.Join(*folder, "volumes")); err != nil {
		return err
	}
	if err := os.MkdirAll(*folder, 0o755); err != nil {
		return err
	}
	if err := buildEcho(*folder); err != nil {
		return err
	}
	topology, err := newTopology(*folder, tests.ConformanceTests)
	if err != nil {
		return err
	}
	// Several runs can have a world each.
	name := fmt.Sprintf("conformance-%d", os.Getpid())
	file, err := topology.write(name)
	if err != nil {
		return err
	}
	world, err := startWorld(*canal, name, file)
	if err != nil {
		return err
	}
	defer world.stop()
	program, err := os.Executable()
	if err != nil {
		return err
	}
	// Most requests of a failing test wait, so that more run at once than the machine has cores.
	suite := world.command(outsideHost, program, "-inside="+name, "-canal="+*canal, "-folder="+*folder, "-only="+*only,
		"-test.parallel=8", "-test.timeout="+flag.Lookup("test.timeout").Value.String())
	suite.Stdout, suite.Stderr = os.Stdout, os.Stderr
	return suite.Run()
}

// runSuite runs the suite, whose words go to a file, and prints the report.
func runSuite(m *testing.M) error {
	topology, err := newTopology(*folder, tests.ConformanceTests)
	if err != nil {
		return err
	}
	world := &world{canal: *canal, name: *inside}
	if judged, err = newCluster(world, topology); err != nil {
		return err
	}
	if server, err = (&execServer{world, filepath.Join(*folder, "echo")}).start(); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(*folder, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	printed := os.Stdout
	os.Stdout = log
	if err := flag.Set("test.v", "true"); err != nil {
		return err
	}
	m.Run()
	if err := report.AddReasons(outcomes, log.Name()); err != nil {
		return err
	}
	report.Write(printed, outcomes)
	if len(outcomes) != len(tests.ConformanceTests) && *only == "" {
		return fmt.Errorf("%d of %d tests have a result; %s says why", len(outcomes), len(tests.ConformanceTests), log.Name())
	}
	return nil
}

func TestMesh(t *testing.T) {
	s := newSuite(t, features.SupportGateway)
	runTests(t, s, features.SupportMesh, "")
}

// TestGateway asks Canal for an ingress Gateway as the suite's setup does: by a GatewayClass.
func TestGateway(t *testing.T) {
	class := &gatewayv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: gatewayClass}}
	class.Spec.ControllerName = "canal.mesh/gateway"
	missing := ""
	if err := judged.Create(t.Context(), class); err != nil {
		missing = "Canal has no ingress Gateway yet: " + err.Error()
	}
	judged.takeRefusal()
	s := newSuite(t, features.SupportMesh)
	runTests(t, s, features.SupportGateway, missing)
}

// runTests sets up what the tests of the feature share, and runs them. If something is missing that
// all of them need, or the setup fails, none is run.
func runTests(t *testing.T, s *suite.ConformanceTestSuite, feature features.FeatureName, missing string) {
	if missing == "" && !t.Run("Setup", func(t *testing.T) { s.Setup(t, tests.ConformanceTests) }) {
		missing = judged.takeRefusal()
		if missing == "" {
			missing = "the suite's setup failed; the log says why"
		}
	}
	for _, test := range tests.ConformanceTests {
		if !slices.Contains(test.Features, feature) || *only != "" && *only != test.ShortName {
			continue
		}
		result := report.Outcome{Test: test, Verdict: report.NotRun, Reason: missing}
		if missing == "" {
			result.Verdict, result.Reason = runTest(t, s, test)
		}
		outcomes = append(outcomes, result)
	}
}

func runTest(t *testing.T, s *suite.ConformanceTestSuite, test suite.ConformanceTest) (report.Verdict, string) {
	isSkipped := false
	isPassed := t.Run(test.ShortName, func(t *testing.T) {
		defer func() { isSkipped = t.Skipped() }()
		test.Run(t, s)
	})
	refusal := judged.takeRefusal()
	switch {
	case isSkipped:
		return report.NotRun, "the suite skips it; the log says why"
	case isPassed:
		return report.Passed, ""
	default:
		return report.Failed, refusal
	}
}

// newSuite returns a suite of all features except one: Gateway's or the mesh's.
func newSuite(t *testing.T, except features.FeatureName) *suite.ConformanceTestSuite {
	access := &rest.Config{Host: server}
	clientset, err := kubernetes.NewForConfig(access)
	if err != nil {
		t.Fatal(err)
	}
	s, err := suite.NewConformanceTestSuite(suite.ConformanceOptions{
		ConfigurableOptions: suite.ConfigurableOptions{
			GatewayClassName:           gatewayClass,
			EnableAllSupportedFeatures: true,
			ExemptFeatures:             []features.FeatureName{except},
			DisableParallelTests:       true,
			CleanupTestResources:       true,
			AllowCRDsMismatch:          true,
			TimeoutConfig:              patience(except),
		},
		Client:     judged,
		Clientset:  clientset,
		RestConfig: access,
		ManifestFS: []fs.FS{conformance.Manifests},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// patience returns the suite's limits for the tests of all features except one.
//
// Without a route, a Service of the mesh tests spreads its requests over both versions of its pods,
// so that the suite's 3 right answers in a row come by chance too: with none of its routes applied, 4
// tests of routes passed. 20 in a row do not come by chance.
//
// `canal apply` returns when the data planes run the change, so that right answers come at once. The
// suite's 30 s would only make each wrong one longer.
func patience(except features.FeatureName) config.TimeoutConfig {
	limits := config.DefaultTimeoutConfig()
	if except == features.SupportGateway {
		limits.RequiredConsecutiveSuccesses = 20
		limits.MaxTimeToConsistency = 20 * time.Second
	}
	return limits
}
