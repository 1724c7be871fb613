package report

import (
	"slices"

	"sigs.k8s.io/gateway-api/conformance/utils/suite"
	"sigs.k8s.io/gateway-api/pkg/features"
)

// feature is what the report says about one of the names of pkg/features.
type feature struct {
	name features.FeatureName
	// description completes the sentence "Canal can".
	description string
	// missing is the reason why Canal does not claim the feature; "" if it does.
	missing string
}

// known are all names of pkg/features, in the order of the document.
var known = []feature{
	{features.SupportGateway, "serve clients outside the mesh at Gateways", ""},
	{features.SupportGatewayPort8080, "serve a listener at port 8080", ""},
	{features.SupportGatewayStaticAddresses, "give a Gateway the addresses that it requests", "a Gateway that requests an IPv4 address has an IPv6 address too, and the test expects one address"},
	{features.SupportGatewayHTTPListenerIsolation, "keep the routes of listeners with overlapping hostnames apart", ""},
	{features.SupportGatewayInfrastructure, "put the labels and annotations of a Gateway on the objects that serve it", "no object of a cluster serves a Gateway: replicas are the provider's"},
	{features.SupportGatewayAddressEmpty, "choose the value of an address that a Gateway leaves empty", ""},
	{features.SupportGatewayHTTPSListenerDetectMisdirectedRequests, "answer 421 to a request on the connection of another listener", ""},
	{features.SupportGatewayFrontendClientCertificateValidation, "validate clients' certificates", ""},
	{features.SupportGatewayFrontendClientCertificateValidationInsecureFallback, "serve clients without a valid certificate where the Gateway asks for it", ""},
	{features.SupportGatewayBackendClientCertificate, "present a certificate of the Gateway's to backends", "Canal does not read BackendTLSPolicy yet"},
	{features.SupportGatewayAddressRoutability, "limit from where a Gateway's address is reached", "no test of the suite has the name"},
	{features.SupportGatewayAddressRoutabilityCluster, "serve a Gateway inside the cluster only", "no test of the suite has the name"},
	{features.SupportGatewayRouteHostnameIntersectionPrecedence, "give the most specific hostname precedence over matches", ""},
	{features.SupportGatewayListenerFilters, "apply filters to all routes of a listener", "no test of the suite has the name"},
	{features.SupportListenerSet, "add listeners to a Gateway by ListenerSets", ""},
	{features.SupportReferenceGrant, "refuse references to other namespaces without a ReferenceGrant", ""},
	{features.SupportHTTPRoute, "route HTTP requests", ""},
	{features.SupportHTTPRouteDestinationPortMatching, "apply a route to one port of its parent", ""},
	{features.SupportHTTPRouteParentRefPort, "attach a route to the listeners of one port", ""},
	{features.SupportHTTPRouteNamedRouteRule, "name rules", ""},
	{features.SupportHTTPRouteQueryParamMatching, "match query parameters", ""},
	{features.SupportHTTPRouteMethodMatching, "match methods", ""},
	{features.SupportHTTPRouteResponseHeaderModification, "change the headers of responses", ""},
	{features.SupportHTTPRouteBackendRequestHeaderModification, "change the headers of requests for one backend", ""},
	{features.SupportHTTPRouteHostRewrite, "rewrite the host", ""},
	{features.SupportHTTPRoutePathRewrite, "rewrite the path", ""},
	{features.SupportHTTPRouteBackendURLRewrite, "rewrite host and path for one backend", ""},
	{features.SupportHTTPRoutePortRedirect, "redirect to another port", ""},
	{features.SupportHTTPRouteSchemeRedirect, "redirect to another scheme", ""},
	{features.SupportHTTPRoutePathRedirect, "redirect to another path", ""},
	{features.SupportHTTPRoute303RedirectStatusCode, "redirect with status 303", ""},
	{features.SupportHTTPRoute307RedirectStatusCode, "redirect with status 307", ""},
	{features.SupportHTTPRoute308RedirectStatusCode, "redirect with status 308", ""},
	{features.SupportHTTPRouteRequestMirror, "mirror requests", ""},
	{features.SupportHTTPRouteRequestMultipleMirrors, "mirror requests to several backends", ""},
	{features.SupportHTTPRouteRequestPercentageMirror, "mirror a part of the requests", ""},
	{features.SupportHTTPRouteRequestTimeout, "limit the time of a request", ""},
	{features.SupportHTTPRouteBackendTimeout, "limit the time of an attempt", ""},
	{features.SupportHTTPRouteRetryCodes, "retry by the status of a response", ""},
	{features.SupportHTTPRouteRetryConnectionError, "retry after a connection error", ""},
	{features.SupportHTTPRouteCORS, "answer preflight requests and add the headers of CORS", ""},
	{features.SupportHTTPRouteBackendProtocolH2C, "speak HTTP/2 without TLS to backends", ""},
	{features.SupportHTTPRouteBackendProtocolWebSocket, "carry WebSocket connections", ""},
	{features.SupportGRPCRoute, "route gRPC calls", ""},
	{features.SupportGRPCRouteNamedRouteRule, "name rules of GRPCRoutes", ""},
	{features.SupportGRPCRouteRequestHeaderModifier, "change the headers of gRPC calls", ""},
	{features.SupportTLSRoute, "route TLS connections by their server name, unread", ""},
	{features.SupportTLSRouteModeTerminate, "terminate TLS and route the plaintext by its server name", ""},
	{features.SupportTLSRouteModeMixed, "terminate some connections of a port and pass others through", ""},
	{features.SupportTCPRoute, "route TCP connections", ""},
	{features.SupportUDPRoute, "route datagrams at Gateways", "Gateways have no listeners of protocol UDP yet"},
	{features.SupportBackendTLSPolicy, "speak TLS to backends", "Canal does not read BackendTLSPolicy yet"},
	{features.SupportBackendTLSPolicySANValidation, "verify the names in backends' certificates", "Canal does not read BackendTLSPolicy yet"},
	{features.SupportClusterTrustBundle, "validate certificates by ClusterTrustBundles", "no test of the suite has the name"},
	{features.SupportMesh, "route requests between the pods of a mesh", ""},
	{features.SupportMeshClusterIPMatching, "apply routes only to connections to a Service's address", ""},
	{features.SupportMeshConsumerRoute, "apply a route to the clients of one namespace only", ""},
	{features.SupportMeshHTTPRouteRewritePath, "rewrite the path in a mesh", ""},
	{features.SupportMeshHTTPRouteSchemeRedirect, "redirect to another scheme in a mesh", ""},
	{features.SupportMeshHTTPRouteRedirectPort, "redirect to another port in a mesh", ""},
	{features.SupportMeshHTTPRouteRedirectPath, "redirect to another path in a mesh", ""},
	{features.SupportMeshHTTPRouteBackendRequestHeaderModification, "change the headers of requests for one backend in a mesh", ""},
	{features.SupportMeshHTTPRouteQueryParamMatching, "match query parameters in a mesh", ""},
	{features.SupportMeshHTTPRouteNamedRouteRule, "name rules in a mesh", ""},
}

// driverParts are the tests that judge what the driver does in place of an API server. They run, but
// prove nothing about Canal, whose conditions have no observedGeneration and are not stored.
var driverParts = map[string]string{
	"GatewayObservedGenerationBump":      driversGenerations,
	"GatewayClassObservedGenerationBump": driversGenerations,
	"HTTPRouteObservedGenerationBump":    driversGenerations,
	"GatewayPreserveForeignConditions":   driversStatus,
	"HTTPRoutePreserveForeignStatus":     driversStatus,
}

const (
	driversGenerations = "no proof: generations and observedGeneration are the driver's; Canal reports none"
	driversStatus      = "no proof: the driver keeps what others wrote into a status; Canal stores no status"
)

// DriverPart returns why a test proves nothing about Canal although it passes; "" if it proves something.
func DriverPart(test suite.ConformanceTest) string { return driverParts[test.ShortName] }

// Claimed returns the features that Canal claims.
func Claimed() []features.FeatureName {
	var names []features.FeatureName
	for _, f := range known {
		if f.missing == "" {
			names = append(names, f.name)
		}
	}
	return names
}

// Unclaimed returns why a test is not run: the first of its features that Canal does not claim, and
// the reason for that. It is "" for a test that is run.
func Unclaimed(test suite.ConformanceTest) string {
	for _, f := range known {
		if f.missing != "" && slices.Contains(test.Features, f.name) {
			return string(f.name) + " is not claimed: " + f.missing
		}
	}
	return ""
}
