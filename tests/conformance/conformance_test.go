// Package conformance runs the Gateway API conformance suite, version 1.7.0, against Canal, and
// prints for each of its tests whether it passed, failed, or was not run and why, and the counts of
// each feature beside the bars that they are judged by. A whole run writes docs/features.md.
//
// The tests are the suite's own code, unchanged. Three things stand in for a cluster: [cluster], a
// client whose changes are made in a tenant by `canal apply`; [execServer], by which the suite runs
// its client in a pod and reads the logs of pods; and package cmd/echo, the program of the suite's
// pods. Pods, nodes, gateways and the controller are a world's, with real processes and real traffic;
// the suite itself runs as a client outside the mesh.
//
// It does not make Kubernetes. The defaults of fields, generations and the places where a status is
// stored are the driver's; what a status says is Canal's, by `canal status --conditions`.
//
// The exit code is 0 if all bars are held, 1 if one is missed, 2 if the tests could not be run.
package conformance

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
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
	canal      = flag.String("canal", "../../target/debug/canal", "path of canal, beside which its other programs stand")
	folder     = flag.String("folder", "../../target/conformance", "folder for the world's file, the pods' program and the suite's log")
	only       = flag.String("only", "", "run only the test of this name")
	crds       = flag.String("crds", "", "folder of Gateway API's definitions of kinds")
	repository = flag.String("repository", "../..", "the repository, of which a whole run writes docs/features.md")
	inside     = flag.String("inside", "", "run the suite in this world, from whose outside host this process runs")

	// What the tests below share, and their results.
	judged   *cluster
	server   string
	outcomes []report.Outcome
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Without this check, a run of no test would hold.
	if err := report.CheckName(*only, tests.ConformanceTests); err != nil {
		fmt.Fprintf(os.Stderr, "conformance: -only: %v\n", err)
		os.Exit(2)
	}
	part := makeWorld
	if *inside != "" {
		part = func() (bool, error) { return runSuite(m) }
	}
	isHeld, err := part()
	switch {
	case err != nil:
		fmt.Fprintf(os.Stderr, "conformance: %v\n", err)
		os.Exit(2)
	case !isHeld:
		os.Exit(1)
	}
	os.Exit(0) // a test of the suite that failed would make it 1
}

// makeWorld makes the world and runs this program again as a client outside the mesh, because the suite's
// Gateway tests dial from their own process.
func makeWorld() (isHeld bool, err error) {
	// The kernel ends the world (Pdeathsig) when the thread that started it ends, so the thread must
	// stay.
	runtime.LockOSThread()
	// The client has another working directory.
	for _, path := range []*string{canal, folder, repository} {
		if *path, err = filepath.Abs(*path); err != nil {
			return false, err
		}
	}
	// Files of an earlier run must not serve the pods of this one.
	if err := os.RemoveAll(filepath.Join(*folder, "volumes")); err != nil {
		return false, err
	}
	if err := os.MkdirAll(*folder, 0o755); err != nil {
		return false, err
	}
	if err := buildEcho(*folder); err != nil {
		return false, err
	}
	found, err := findCRDs()
	if err != nil {
		return false, err
	}
	topology, err := newTopology(*folder, tests.ConformanceTests)
	if err != nil {
		return false, err
	}
	// Several runs can have a world each.
	name := fmt.Sprintf("conformance-%d", os.Getpid())
	file, err := topology.write(name)
	if err != nil {
		return false, err
	}
	world, err := startWorld(*canal, name, file)
	if err != nil {
		return false, err
	}
	defer world.stop()
	program, err := os.Executable()
	if err != nil {
		return false, err
	}
	// Most requests of a failing test wait, so that more run at once than the machine has cores.
	suite := world.command(clientHost, program, "-inside="+name, "-canal="+*canal, "-folder="+*folder, "-only="+*only, "-crds="+found, "-repository="+*repository,
		"-test.parallel=8", "-test.timeout="+flag.Lookup("test.timeout").Value.String())
	suite.Stdout, suite.Stderr = os.Stdout, os.Stderr
	err = suite.Run()
	// A test program ends with 1 if tests failed, which is a result. Other codes mean that it could
	// not run.
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.ExitCode() == 1 {
		return false, nil
	}
	return err == nil, err
}

// runSuite runs the suite, whose words go to a file, and prints the report.
func runSuite(m *testing.M) (bool, error) {
	started := time.Now()
	topology, err := newTopology(*folder, tests.ConformanceTests)
	if err != nil {
		return false, err
	}
	world := &world{canal: *canal, name: *inside}
	if judged, err = newCluster(world, topology, *crds); err != nil {
		return false, err
	}
	if server, err = (&execServer{world, filepath.Join(*folder, "echo")}).start(); err != nil {
		return false, err
	}
	log, err := os.Create(filepath.Join(*folder, "log"))
	if err != nil {
		return false, err
	}
	defer log.Close()
	printed := os.Stdout
	os.Stdout = log
	if err := flag.Set("test.v", "true"); err != nil {
		return false, err
	}
	m.Run()
	if err := report.AddReasons(outcomes, log.Name()); err != nil {
		return false, err
	}
	report.Write(printed, outcomes)
	if *only != "" {
		return !slices.ContainsFunc(outcomes, func(o report.Outcome) bool { return o.Verdict == report.Failed }), nil
	}
	if len(outcomes) != len(tests.ConformanceTests) {
		return false, fmt.Errorf("%d of %d tests have a result; %s says why", len(outcomes), len(tests.ConformanceTests), log.Name())
	}
	isHeld := report.Judge(printed, outcomes)
	fmt.Fprintf(printed, "%s for all tests\n", time.Since(started).Round(time.Second))
	return isHeld, report.WriteDocuments(*repository, outcomes)
}

func TestMesh(t *testing.T) {
	s := newSuite(t, features.SupportGateway)
	runTests(t, s, features.SupportMesh, "")
}

// TestGateway asks Canal for an ingress Gateway as the suite's setup does: by a GatewayClass.
func TestGateway(t *testing.T) {
	class := &gatewayv1.GatewayClass{ObjectMeta: metav1.ObjectMeta{Name: gatewayClass}}
	class.Spec.ControllerName = controllerName
	missing := ""
	if err := judged.Create(t.Context(), class); err != nil {
		missing = "Canal refuses the GatewayClass: " + err.Error()
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
		result := report.Outcome{Test: test, Verdict: report.NotRun, Reason: cmp.Or(report.Unclaimed(test), missing)}
		if result.Reason == "" {
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
		return report.Passed, report.DriverPart(test)
	default:
		return report.Failed, refusal
	}
}

// newSuite returns a suite of the claimed features except one: Gateway's or the mesh's.
func newSuite(t *testing.T, except features.FeatureName) *suite.ConformanceTestSuite {
	access := &rest.Config{Host: server}
	clientset, err := kubernetes.NewForConfig(access)
	if err != nil {
		t.Fatal(err)
	}
	s, err := suite.NewConformanceTestSuite(suite.ConformanceOptions{
		ConfigurableOptions: suite.ConfigurableOptions{
			GatewayClassName:         gatewayClass,
			SupportedFeatures:        report.Claimed(),
			ExemptFeatures:           []features.FeatureName{except},
			DisableParallelTests:     true,
			CleanupTestResources:     true,
			AllowCRDsMismatch:        true,
			TimeoutConfig:            patience(except),
			UsableNetworkAddresses:   networkAddresses(usableAddress),
			UnusableNetworkAddresses: networkAddresses(unusableAddress),
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

func networkAddresses(address string) []gatewayv1.GatewaySpecAddress {
	kind := gatewayv1.IPAddressType
	return []gatewayv1.GatewaySpecAddress{{Type: &kind, Value: address}}
}

// patience returns the suite's limits for the tests of all features except one.
//
// Without a route, a Service of the mesh tests spreads its requests over both versions of its pods,
// so that the suite's 3 right answers in a row come by chance too: with none of its routes applied, 4
// tests of routes passed. 20 in a row do not come by chance.
//
// `canal apply` returns when the data planes run the change, and conditions follow from the objects, so
// that right answers come at once. The suite's limits would only make each wrong one longer.
func patience(except features.FeatureName) config.TimeoutConfig {
	limits := config.DefaultTimeoutConfig()
	for _, limit := range []*time.Duration{
		&limits.GatewayMustHaveAddress, &limits.GatewayMustHaveCondition, &limits.GatewayStatusMustHaveListeners,
		&limits.GatewayListenersMustHaveConditions, &limits.ListenerSetMustHaveCondition,
		&limits.ListenerSetListenersMustHaveConditions, &limits.GWCMustBeAccepted, &limits.HTTPRouteMustNotHaveParents,
		&limits.HTTPRouteMustHaveCondition, &limits.TLSRouteMustHaveCondition, &limits.TCPRouteMustHaveCondition,
		&limits.UDPRouteMustHaveCondition, &limits.RouteMustHaveParents, &limits.NamespacesMustBeReady,
		&limits.LatestObservedGenerationSet,
	} {
		// The suite's own limits are up to minutes, for clusters that start machines. Nobody measured this
		// value.
		*limit = 20 * time.Second
	}
	if except == features.SupportGateway {
		// One success could be of an endpoint that a change has not reached yet.
		limits.RequiredConsecutiveSuccesses = 20
		limits.MaxTimeToConsistency = 20 * time.Second
	}
	return limits
}
